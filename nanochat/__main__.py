"""`python -m nanochat`: the commands, as `python -m scripts.help` lists and runs them."""

from scripts.help import command_line

if __name__ == "__main__":
    command_line()
