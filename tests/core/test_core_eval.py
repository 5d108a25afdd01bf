"""The CORE metric: prompts, the tokens that count, results independent of batches, and bad
bundles."""

import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from dev.make_eval_bundle import make_eval_bundle, make_repeater
from nanochat import core_eval
from nanochat.core_eval import (
    Item,
    Rows,
    Task,
    evaluate_core,
    evaluate_task,
    make_prompts,
    make_rows,
    read_bundle,
)
from nanochat.engine import load_model
from nanochat.run_journal import Terminal
from nanochat.run_stop import StopWatch
from tests import training


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_eval_bundle(tmp_path_factory.mktemp("bundle") / "eval_bundle", num_items=10)


@pytest.fixture(scope="module")
def repeater():
    return make_repeater(0)


# ---- prompts -------------------------------------------------------------------------------------


def task_of(kind, items, num_fewshot=1, delimiter=" "):
    return Task("made up", kind, num_fewshot, delimiter, 0.25, items)


@pytest.mark.parametrize(
    "kind, delimiter, items, expected",
    [
        (
            "multiple_choice",
            "=",
            [Item(["Wet?"] * 2, ["Sand", "Water"], 1), Item(["Hot?"] * 2, ["Fire", "Ice"], 0)],
            ["Hot?=Fire\n\nWet?=Sand", "Hot?=Fire\n\nWet?=Water"],
        ),
        (
            "schema",
            "=",
            [Item(["He", "It"], ["fell"] * 2, 0), Item(["Snow", "Rain"], ["melts"] * 2, 0)],
            ["Snow=melts\n\nHe=fell", "Snow=melts\n\nIt=fell"],
        ),
        # the space before an answer is not a separate token
        (
            "language_modeling",
            " ",
            [Item(["Paris is in"], ["France"], 0), Item(["Two and"], ["two "], 0)],
            ["Two and two \n\nParis is in", "Two and two \n\nParis is in France"],
        ),
    ],
)
def test_a_prompt_consists_of_solved_items_and_the_question(kind, delimiter, items, expected):
    assert make_prompts(task_of(kind, items, delimiter=delimiter), 0) == expected


def test_items_are_shuffled_and_drawn_as_in_nanochat(tmp_path):
    """The numbers come from nanochat's `random.Random(1337).shuffle` and `random.Random(1234 +
    index).sample`."""
    path = make_eval_bundle(tmp_path, num_items=10) / "eval_data" / "made_up" / "text_fewshot.jsonl"
    path.write_text("".join(f'{{"context": "{i}", "continuation": "!"}}\n' for i in range(10)))
    task = read_bundle(tmp_path)[-1]
    assert [item.contexts[0] for item in task.items] == list("0372164589")
    numbered = task_of(
        "language_modeling", [Item([str(i)], ["!"], 0) for i in range(10)], num_fewshot=3
    )
    shown = [
        make_prompts(numbered, index)[0].replace("\n\n", " ").split(" ! ") for index in (0, 1, 7)
    ]
    assert shown == [["8", "2", "1", "0"], ["7", "8", "4", "1"], ["8", "3", "2", "7"]]


@pytest.mark.parametrize(
    "kind, tokens, max_tokens, kept, starts",
    [
        ("multiple_choice", [[0, 1, 2, 3], [0, 1, 4]], 9, [[0, 1, 2, 3], [0, 1, 4]], [2, 2]),
        # no token of the second counts
        ("multiple_choice", [[0, 1, 2], [0, 1]], 9, [[0, 1, 2], [0, 1]], [2, 2]),
        ("schema", [[0, 1, 2, 7, 8], [0, 5, 7, 8]], 9, [[0, 1, 2, 7, 8], [0, 5, 7, 8]], [3, 2]),
        (
            "schema",
            [[0, 1], [0, 1]],
            9,
            [[0, 1], [0, 1]],
            [1, 1],
        ),  # the first token has no prediction
        ("language_modeling", [[0, 1], [0, 1, 2, 3]], 9, [[0, 1, 2, 3]], [2]),
        # a token across the edge belongs to the answer
        ("language_modeling", [[0, 1], [0, 4, 2]], 9, [[0, 4, 2]], [1]),
        (
            "language_modeling",
            [[0, 1, 2], [0, 1, 2, 3, 4]],
            3,
            [[2, 3, 4]],
            [1],
        ),  # the start is cut
        ("schema", [[0, 1, 2, 7, 8], [0, 5, 7, 8]], 2, [[7, 8], [7, 8]], [1, 1]),
    ],
)
def test_the_tokens_that_distinguish_the_answers_count(kind, tokens, max_tokens, kept, starts):
    assert make_rows(task_of(kind, []), 5, tokens, max_tokens) == Rows(5, kept, starts)


def test_the_first_of_the_lowest_losses_is_the_answer():
    def answer(*losses):
        items = [Item([""] * len(losses), [""] * len(losses), gold) for gold in range(len(losses))]
        scores = [(loss, False) for loss in losses]
        return [
            i for i in range(len(losses)) if core_eval.is_right(task_of("schema", items), i, scores)
        ]

    nan = math.nan
    assert [answer(2, 1, 3), answer(2, 1, 1), answer(2, nan, 1), answer(nan, 1, 0)] == [
        [1],
        [1],
        [2],
        [0],
    ]
    text = task_of("language_modeling", [Item([""], [""], 0)])
    assert core_eval.is_right(text, 0, [(0.5, True)]) and not core_eval.is_right(
        text, 0, [(0.5, False)]
    )
    assert not core_eval.is_right(text, 0, [(nan, True)]), "an answer without tokens is wrong"


# ---- evaluation ----------------------------------------------------------------------------------


def alone(model, row, start):
    """The `score` of a row by itself, without padding, in the plainest way."""
    with torch.no_grad():
        log_p = model(torch.tensor([row]))[0, :-1].double().log_softmax(-1)
    counted = [
        (-log_p[i - 1, row[i]].item(), int(log_p[i - 1].argmax()) == row[i])
        for i in range(start, len(row))
    ]
    return sum(loss for loss, _ in counted) / len(counted) if counted else math.nan, all(
        ok for _, ok in counted
    )


def test_scores_equal_those_of_each_row_by_itself(bundle, repeater, monkeypatch):
    model, tokenizer = repeater
    scored, score = [], core_eval.score

    def recorded(model, batch, pad):
        scores = score(model, batch, pad)
        scored.extend(
            (len(batch), *entry)
            for rows, of_rows in zip(batch, scores)
            for entry in zip(rows.tokens, rows.starts, of_rows)
        )
        return scores

    monkeypatch.setattr(core_eval, "score", recorded)
    right = [sum(evaluate_task(model, tokenizer, task)) for task in read_bundle(bundle)]
    for _, row, start, (loss, likeliest) in scored[::7]:
        expected = alone(model, row, start)
        assert (loss, likeliest) == (pytest.approx(expected[0], abs=1e-4, nan_ok=True), expected[1])
    assert all(0 < n < 10 for n in right[::2]), (
        f"the case: some answers are right, others wrong {right}"
    )
    assert max(n for n, *_ in scored) > 5, "the case: batches of several items"
    assert max(len(row) for _, row, *_ in scored) > 300, "the case: long prompts"
    assert any(math.isnan(loss) for *_, (loss, _) in scored), (
        "the case: a choice without tokens that count"
    )


def test_results_do_not_depend_on_other_rows_of_the_batch(bundle, repeater, monkeypatch):
    """To the bit, on a CPU: so equal choices tie in any batch."""
    model, tokenizer = repeater
    results = []
    losses = list[tuple[float, ...]]()
    cross_entropy = F.cross_entropy

    def recorded(*args, **kwargs):
        loss = cross_entropy(*args, **kwargs)
        losses.append(tuple(loss.tolist()))
        return loss

    monkeypatch.setattr(core_eval.F, "cross_entropy", recorded)
    for batch_tokens in (1, 1024, 1 << 20):
        monkeypatch.setattr(core_eval, "BATCH_TOKENS", batch_tokens)
        results.append(
            (
                [evaluate_task(model, tokenizer, task) for task in read_bundle(bundle)[::3]],
                sorted(losses),
            )
        )
        losses.clear()
    assert results[0] == results[1] == results[2]


# ---- bundles -------------------------------------------------------------------------------------


def test_half_a_surrogate_pair_in_a_bundle_is_named(tmp_path):
    """Regression: a UnicodeEncodeError that named no file."""
    config = make_eval_bundle(tmp_path, num_items=10) / "core.yaml"
    config.write_text(re.sub("dataset_uri: .*", r'dataset_uri: "\\uD800"', config.read_text()))
    with pytest.raises(ValueError, match=rf"^{config}: not valid YAML .*surrogates not allowed"):
        read_bundle(tmp_path)


def test_max_per_task_takes_the_same_items_every_time(bundle):
    few, all_of_them = read_bundle(bundle, 6), read_bundle(bundle)
    assert [task.items for task in few] == [task.items[:6] for task in all_of_them]
    assert [len(task.items) for task in all_of_them] == [10] * 7
    assert (few[0].baseline, few[0].num_fewshot, few[2].delimiter) == (0.25, 0, " ")
    most = max(task.num_fewshot for task in all_of_them)
    with pytest.raises(
        ValueError,
        match=f"got {most} items .* show up to {most} others; pass at least {most + 1}, or",
    ):
        read_bundle(bundle, most)
    assert len(read_bundle(bundle, most + 1)) == 7, "the advice is right"


def change(path, before, after):
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after, 1))


@pytest.mark.parametrize(
    "name, before, after, message",
    [
        (
            "core.yaml",
            None,
            "",
            r"core.yaml: the file does not exist.* needs it; fetch .* -m nanochat.dataset",
        ),
        ("eval_meta_data.csv", None, "", "eval_meta_data.csv: the file does not exist"),
        (
            "eval_data/made_up/text.jsonl",
            None,
            "",
            r"text.jsonl: the data of the task 'text' does not exist",
        ),
        ("core.yaml", "icl_tasks:", "icl_tasks: [", r"core.yaml: not valid YAML \("),
        ("core.yaml", "icl_tasks:", "depth: !!float\nicl_tasks:", r"core.yaml: not valid YAML \("),
        ("core.yaml", "icl_tasks:", "icl_tasks: []\nothers:", "core.yaml: icl_tasks is empty"),
        ("core.yaml", "icl_tasks:", "tasks:", "core.yaml: icl_tasks: expected a list, got nothing"),
        (
            "core.yaml",
            "icl_task_type: schema",
            "icl_task_type: riddle",
            "'schema': icl_task_type is 'riddle', expected",
        ),
        (
            "core.yaml",
            "- 4\n",
            "- 40\n",
            r"schema_fewshot.jsonl: .* has 10 items, but each prompt shows 40 others",
        ),
        *(
            (
                "core.yaml",
                "dataset_uri: made_up/text.jsonl",
                f"dataset_uri: {uri}",
                "dataset_uri is .*, outside of ",
            )
            for uri in (
                "../core.yaml",
                "/etc/passwd",
                "a/../../eval_meta_data.csv",
                "link/passwd",
                '"\\0"',
            )
        ),
        ("core.yaml", "- 4\n", "- -4\n", "num_fewshot is -4, expected 0 or more"),
        (
            "core.yaml",
            "- 4\n",
            "- true\n",
            r"num_fewshot\[0\]: expected a whole number, got true or false",
        ),
        (
            "eval_meta_data.csv",
            "schema_fewshot,",
            "renamed,",
            "no row has a baseline .* for the task 'schema_fewshot' of ",
        ),
        (
            "eval_meta_data.csv",
            "Random baseline",
            "Chance",
            r"eval_meta_data.csv: expected the columns .*Random baseline",
        ),
        ("eval_meta_data.csv", ",25.0", ",100", "no row has a baseline from 0 to below 100"),
        ("eval_data/made_up/choices.jsonl", "{", "[", "choices.jsonl, line 1: not valid JSON"),
        (
            "eval_data/made_up/choices.jsonl",
            '"query"',
            '"question"',
            "choices.jsonl, line 1: query: expected a string",
        ),
        (
            "eval_data/made_up/long_choices.jsonl",
            '"gold": 1',
            '"gold": 9',
            "line 1: gold is 9, expected 0 to ",
        ),
    ],
)
def test_a_bad_bundle_is_one_sentence(tmp_path, name, before, after, message):
    path = make_eval_bundle(tmp_path, num_items=10) / name
    (tmp_path / "eval_data" / "link").symlink_to("/etc")
    path.unlink() if before is None else change(path, before, after)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as e:
        read_bundle(tmp_path)
    assert "\n" not in str(e.value)


# ---- in training ---------------------------------------------------------------------------------


def test_a_run_logs_its_core_metric_when_due(tmp_path, monkeypatch):
    bundle = make_eval_bundle(
        tmp_path / "bundle", num_items=10, labels=("choices", "schema", "text")
    )
    with training.workplace(tmp_path / "base", **training.SMALL):
        flags = {
            "core_metric_every": 2,
            "core_metric_max_per_task": 6,
            "num_iterations": 3,
            "save_every": -1,
        }
        assert "eval_bundle/core.yaml: the file does not exist" in training.refuse(**flags)
        assert not training.run_dir().exists(), "the bundle is checked before anything is written"
        bundle = bundle.rename(tmp_path / "base" / "eval_bundle")
        seen = []
        with monkeypatch.context() as patch:
            patch.setattr(
                Terminal, "event", lambda self, name, step, record: seen.append((name, record))
            )
            outcome = training.succeed(**flags)
        events = training.events("core")
        assert [event["step"] for event in events] == [2, 3] and len(
            events[0]["centered_results"]
        ) == 3
        model, tokenizer, _ = load_model(training.final(), "cpu")
        scores = list(evaluate_core(model, tokenizer, read_bundle(bundle, 6)))
        assert events[1]["core_metric"] == core_eval.summary(scores)["core_metric"]
        assert [record["core_metric"] for name, record in seen if name == "core"] == [
            event["core_metric"] for event in events
        ]
        assert f"step 00003 | CORE metric {events[1]['core_metric']:.4f} (3 tasks)" in outcome.out
        training.succeed(**{**flags, "core_metric_every": -1, "model_tag": "plain"})
        assert training.digests() == training.digests("plain"), (
            "evaluation does not change training"
        )

        asked = StopWatch.asked
        evaluate = core_eval.evaluate_task
        tasks = []
        monkeypatch.setattr(
            StopWatch, "asked", lambda self, *a: "SIGTERM" if tasks else asked(self, *a)
        )
        monkeypatch.setattr(core_eval, "evaluate_task", lambda *a: tasks.append(1) or evaluate(*a))
        outcome = training.succeed(**flags, model_tag="stopped")
        assert "stopped: SIGTERM" in outcome.out and len(tasks) == 1, (
            "stops are handled between two tasks"
        )
        assert training.checkpoints("stopped") == ["checkpoint-2-shutdown"]


def test_the_table_has_nanochats_format(tmp_path):
    easy, lambada = (replace(task_of("", []), label=label) for label in ("arc_easy", "lambada"))
    scores = [core_eval.Score(easy, [True, False]), core_eval.Score(lambada, [True] + 3 * [False])]
    core_eval.write_csv(tmp_path / "x.csv", core_eval.summary(scores))
    assert (tmp_path / "x.csv").read_text() == (
        "Task                               , Accuracy  , Centered  \n"
        "arc_easy                           , 0.500000  , 0.333333  \n"
        "lambada                            , 0.250000  , 0.000000  \n"
        "CORE                               ,           , 0.166667  \n"
    )
