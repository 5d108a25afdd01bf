"""The CORE metric: the prompts, what counts in them, and that neither batches nor neighbours move a result."""

import math

import pytest
import torch
import torch.nn.functional as F

from dev.make_eval_bundle import make_eval_bundle, make_repeater
from nanochat.engine import load_model
from nanochat.integrations import core_eval
from nanochat.integrations.core_eval import (
    Item,
    Rows,
    Task,
    evaluate_core,
    evaluate_task,
    make_prompts,
    make_rows,
    read_bundle,
)
from nanochat.lifecycle import StopWatch
from nanochat.trainer import Silence
from tests import training


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_eval_bundle(tmp_path_factory.mktemp("bundle") / "eval_bundle", num_items=10)


@pytest.fixture(scope="module")
def repeater():
    return make_repeater(0)


# ---- prompts --------------------------------------------------------------------------------------------------------

def task_of(kind, items, num_fewshot=1, delimiter=" "):
    return Task("made up", kind, num_fewshot, delimiter, 0.25, items)


@pytest.mark.parametrize("kind, items, expected", [
    ("multiple_choice", [Item(["Wet?"] * 2, ["Sand", "Water"], 1), Item(["Hot?"] * 2, ["Fire", "Ice"], 0)],
     ["Hot?=Fire\n\nWet?=Sand", "Hot?=Fire\n\nWet?=Water"]),
    ("schema", [Item(["He", "It"], ["fell"] * 2, 0), Item(["Snow", "Rain"], ["melts"] * 2, 0)],
     ["Snow=melts\n\nHe=fell", "Snow=melts\n\nIt=fell"]),
    ("language_modeling", [Item(["Paris is in"], ["France"], 0), Item(["Two and"], ["two "], 0)],
     ["Two and=two \n\nParis is in=", "Two and=two \n\nParis is in=France"])])
def test_a_prompt_is_solved_items_an_empty_line_and_the_question(kind, items, expected):
    assert make_prompts(task_of(kind, items, delimiter="="), 0) == expected


def test_items_are_shuffled_and_drawn_as_nanochat_does_it(tmp_path):
    """The numbers are those of `random.Random(1337).shuffle` and `random.Random(1234 + index).sample` there."""
    path = make_eval_bundle(tmp_path, num_items=10) / "eval_data" / "made_up" / "text_fewshot.jsonl"
    path.write_text("".join(f'{{"context": "{i}", "continuation": "!"}}\n' for i in range(10)))
    task = read_bundle(tmp_path)[-1]
    assert [item.contexts[0] for item in task.items] == list("0372164589")
    numbered = task_of("language_modeling", [Item([str(i)], ["!"], 0) for i in range(10)], num_fewshot=3)
    shown = [make_prompts(numbered, index)[0].replace("\n\n", " ").split(" ! ") for index in (0, 1, 7)]
    assert shown == [["8", "2", "1", "0"], ["7", "8", "4", "1"], ["8", "3", "2", "7"]]


def test_a_space_before_the_answer_is_no_token_of_its_own():
    task = task_of("language_modeling", [Item(["Paris is in"], ["France"], 0)], num_fewshot=0)
    assert make_prompts(task, 0) == ["Paris is in", "Paris is in France"]


@pytest.mark.parametrize("kind, tokens, max_tokens, kept, starts", [
    ("multiple_choice", [[0, 1, 2, 3], [0, 1, 4]], 9, [[0, 1, 2, 3], [0, 1, 4]], [2, 2]),
    ("multiple_choice", [[0, 1, 2], [0, 1]], 9, [[0, 1, 2], [0, 1]], [2, 2]),  # the second has no token of its own
    ("schema", [[0, 1, 2, 7, 8], [0, 5, 7, 8]], 9, [[0, 1, 2, 7, 8], [0, 5, 7, 8]], [3, 2]),
    ("schema", [[0, 1], [0, 1]], 9, [[0, 1], [0, 1]], [1, 1]),  # nothing predicts the first token
    ("language_modeling", [[0, 1], [0, 1, 2, 3]], 9, [[0, 1, 2, 3]], [2]),
    ("language_modeling", [[0, 1], [0, 4, 2]], 9, [[0, 4, 2]], [1]),  # a token across the edge is the answer's
    ("language_modeling", [[0, 1, 2], [0, 1, 2, 3, 4]], 3, [[2, 3, 4]], [1]),  # the end is kept
    ("schema", [[0, 1, 2, 7, 8], [0, 5, 7, 8]], 2, [[7, 8], [7, 8]], [1, 1])])
def test_what_counts_are_the_tokens_that_tell_the_answers_apart(kind, tokens, max_tokens, kept, starts):
    assert make_rows(task_of(kind, []), 5, tokens, max_tokens) == Rows(5, kept, starts)


def test_the_least_loss_answers_and_of_equals_the_first():
    def answer(*losses):
        items = [Item([""] * len(losses), [""] * len(losses), gold) for gold in range(len(losses))]
        scores = [(loss, False) for loss in losses]
        return [i for i in range(len(losses)) if core_eval.is_right(task_of("schema", items), i, scores)]

    nan = math.nan
    assert [answer(2, 1, 3), answer(2, 1, 1), answer(2, nan, 1), answer(nan, 1, 0)] == [[1], [1], [2], [0]]
    text = task_of("language_modeling", [Item([""], [""], 0)])
    assert core_eval.is_right(text, 0, [(0.5, True)]) and not core_eval.is_right(text, 0, [(0.5, False)])
    assert not core_eval.is_right(text, 0, [(nan, True)]), "an answer without a token is none"


# ---- evaluation -----------------------------------------------------------------------------------------------------

def alone(model, row, start):
    """What `score` must say of a row: computed by itself, without padding, in the plainest way."""
    with torch.no_grad():
        chances = model(torch.tensor([row]))[0, :-1].double().log_softmax(-1)
    counted = [(-chances[i - 1, row[i]].item(), int(chances[i - 1].argmax()) == row[i]) for i in range(start, len(row))]
    return sum(loss for loss, _ in counted) / len(counted) if counted else math.nan, all(ok for _, ok in counted)


def test_scores_are_those_of_each_row_by_itself(bundle, repeater, monkeypatch):
    model, tokenizer = repeater
    seen, score = [], core_eval.score

    def watched(model, batch, pad):
        found = score(model, batch, pad)
        seen.extend((len(batch), row, start, figure) for rows, figures in zip(batch, found)
                    for row, start, figure in zip(rows.tokens, rows.starts, figures))
        return found

    monkeypatch.setattr(core_eval, "score", watched)
    results = [evaluate_task(model, tokenizer, task) for task in read_bundle(bundle)]
    for _, row, start, (loss, likeliest) in seen[::7]:
        expected = alone(model, row, start)
        assert (loss, likeliest) == (pytest.approx(expected[0], abs=1e-5, nan_ok=True), expected[1])
    right = [sum(of_task) for of_task in results]
    assert all(0 < n < 10 for n in right[::2]), f"the case: some are right, some are not {right}"
    assert max(n for n, *_ in seen) > 5, "the case: items go together"
    assert max(len(row) for _, row, *_ in seen) > 300, "the case: long prompts"
    assert any(math.isnan(loss) for *_, (loss, _) in seen), "the case: a choice without a token of its own"


def test_neighbours_do_not_move_a_bit(bundle, repeater, monkeypatch):
    """In the arithmetic of a CPU: so equal choices are a tie, whatever stands beside them."""
    model, tokenizer = repeater
    found, seen, cross_entropy = [], list[tuple[float, ...]](), F.cross_entropy

    def watched(*args, **kwargs):
        losses = cross_entropy(*args, **kwargs)
        seen.append(tuple(losses.tolist()))
        return losses

    monkeypatch.setattr(core_eval.F, "cross_entropy", watched)
    for batch_tokens in (1, 1024, 1 << 20):
        monkeypatch.setattr(core_eval, "BATCH_TOKENS", batch_tokens)
        found.append(([evaluate_task(model, tokenizer, task) for task in read_bundle(bundle)[::3]], sorted(seen)))
        seen.clear()
    assert found[0] == found[1] == found[2]


# ---- bundles --------------------------------------------------------------------------------------------------------

def test_a_share_of_the_items_is_the_same_every_time(bundle):
    few, all_of_them = read_bundle(bundle, 6), read_bundle(bundle)
    assert [task.items for task in few] == [task.items[:6] for task in all_of_them]
    assert [len(task.items) for task in all_of_them] == [10] * 7
    assert (few[0].baseline, few[0].num_fewshot, few[2].delimiter) == (0.25, 0, " ")
    most = max(task.num_fewshot for task in all_of_them)
    with pytest.raises(ValueError, match=f"got {most} items .* show up to {most} others; give at least {most + 1}, or"):
        read_bundle(bundle, most)
    assert len(read_bundle(bundle, most + 1)) == 7, "the advice is right"


def change(path, before, after):
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after, 1))


@pytest.mark.parametrize("name, before, after, message", [
    ("core.yaml", None, "", r"core.yaml: not there, and the CORE metric needs it; python -m nanochat.dataset"),
    ("eval_meta_data.csv", None, "", "eval_meta_data.csv: not there"),
    ("eval_data/made_up/text.jsonl", None, "", r"text.jsonl: the data of the task 'text' are not there"),
    ("core.yaml", "icl_tasks:", "icl_tasks: [", r"core.yaml: not valid YAML \("),
    ("core.yaml", "icl_tasks:", "depth: !!float\nicl_tasks:", r"core.yaml: not valid YAML \(line 1: the tag !!float"),
    ("core.yaml", "icl_tasks:", "a: &a [1]\nb: *a\nicl_tasks:", r"core.yaml: not valid YAML \(line 2: the alias \*a"),
    ("core.yaml", "icl_tasks:", "icl_tasks: []\nothers:", "core.yaml: icl_tasks: no task in it"),
    ("core.yaml", "icl_tasks:", "tasks:", "core.yaml: icl_tasks: expected a list, got nothing"),
    ("core.yaml", "icl_task_type: schema", "icl_task_type: riddle", "'schema' has icl_task_type 'riddle', expected"),
    ("core.yaml", "- 4\n", "- 40\n", r"schema_fewshot.jsonl: 10 items of the task .* each prompt shows 40 others"),
    *(("core.yaml", "dataset_uri: made_up/text.jsonl", f"dataset_uri: {uri}", "dataset_uri .*, which lies outside of ")
      for uri in ("../core.yaml", "/etc/passwd", "a/../../eval_meta_data.csv", "link/passwd", '"\\0"')),
    ("core.yaml", "- 4\n", "- -4\n", r"has num_fewshot \[-4\], expected numbers of 0 or more"),
    ("core.yaml", "- 4\n", "- true\n", r"num_fewshot\[0\]: expected a whole number, got true or false"),
    ("core.yaml", "- 4\n", "- 0.5\n", r"num_fewshot\[0\]: expected a whole number, got a number"),
    ("eval_meta_data.csv", "schema_fewshot,", "renamed,", "the task 'schema_fewshot' of core.yaml has no row"),
    ("eval_meta_data.csv", "Random baseline", "Chance", r"eval_meta_data.csv: expected the columns .*Random baseline"),
    ("eval_meta_data.csv", ",25.0", ",100", "no row there with a baseline from 0 to below 100"),
    ("eval_data/made_up/choices.jsonl", "{", "[", "choices.jsonl, line 1: not valid JSON"),
    ("eval_data/made_up/choices.jsonl", '"query"', '"question"', "choices.jsonl, line 1: query: expected a string"),
    ("eval_data/made_up/long_choices.jsonl", '"gold": 1', '"gold": 9', "line 1: gold is 9, expected the number of one"),
])
def test_a_bad_bundle_is_one_sentence(tmp_path, name, before, after, message):
    path = make_eval_bundle(tmp_path, num_items=10) / name
    (tmp_path / "eval_data" / "link").symlink_to("/etc")
    path.unlink() if before is None else change(path, before, after)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as e:
        read_bundle(tmp_path)
    assert "\n" not in str(e.value)


# ---- in training ----------------------------------------------------------------------------------------------------

def test_a_run_tells_its_core_metric_when_it_is_due(tmp_path, monkeypatch):
    bundle = make_eval_bundle(tmp_path / "bundle", num_items=10, labels=("choices", "schema", "text"))
    with training.workplace(tmp_path / "base", **training.SMALL):
        looks = {"core_metric_every": 2, "core_metric_max_per_task": 6, "num_iterations": 3, "save_every": -1}
        assert "eval_bundle/core.yaml: not there" in training.refuse(**looks)
        assert not training.run_dir().exists(), "it is missed before anything is written"
        trackers = []
        with monkeypatch.context() as patch:
            patch.setattr(Silence, "log", lambda self, values: trackers.append(values))
            outcome = training.succeed(**looks, eval_bundle=bundle)
        told = training.events("core")
        assert [event["step"] for event in told] == [2, 3] and len(told[0]["centered_results"]) == 3
        model, tokenizer, _ = load_model(training.final(), "cpu")
        scores = list(evaluate_core(model, tokenizer, read_bundle(bundle, 6)))
        assert told[1]["core_metric"] == core_eval.summary(scores)["core_metric"]
        assert [v["core_metric"] for v in trackers if "core_metric" in v] == [event["core_metric"] for event in told]
        assert f"step 00003 | CORE metric {told[1]['core_metric']:.4f} (3 tasks)" in outcome.out
        training.succeed(**{**looks, "core_metric_every": -1, "model_tag": "plain"})
        assert training.digests() == training.digests("plain"), "looking moves nothing"

        asked = StopWatch.asked
        monkeypatch.setattr(StopWatch, "asked", lambda self, *a: "SIGTERM" if looking else asked(self, *a))
        looking = []
        evaluate = core_eval.evaluate_task
        monkeypatch.setattr(core_eval, "evaluate_task", lambda *a: looking.append(1) or evaluate(*a))
        outcome = training.succeed(**looks, eval_bundle=bundle, model_tag="stopped")
        assert "stopped: SIGTERM" in outcome.out and len(looking) == 1, "it is asked between two tasks"
        assert training.checkpoints("stopped") == ["checkpoint-2-shutdown"]


def test_the_table_is_nanochats(tmp_path):
    scores = [core_eval.Score("arc_easy", 0.5, 1 / 3), core_eval.Score("lambada", 0.25, 0.25)]
    core_eval.write_csv(tmp_path / "x.csv", core_eval.summary(scores))
    assert (tmp_path / "x.csv").read_text() == (
        "Task                               , Accuracy  , Centered  \n"
        "arc_easy                           , 0.500000  , 0.333333  \n"
        "lambada                            , 0.250000  , 0.250000  \n"
        "CORE                               ,           , 0.291667  \n")
