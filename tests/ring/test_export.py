"""Exports have the checkpoint's exact bits and the tokenizer's ids, and an import restores them.
dev/compare_hf.py and dev/compare_nanochat.py check that transformers and nanochat compute the
same."""

import functools
import json
import logging
import pickle
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import ByteLevelBPETokenizer, Tokenizer

from nanochat import gpt, integrations
from nanochat.checkpoint import find_checkpoint
from nanochat.common import get_base_dir, write_json
from nanochat.engine import load_model
from nanochat.files import default_data_dir
from nanochat.integrations import export_check
from nanochat.run_reader import RunReader
from nanochat.tokenizer import RustBPETokenizer, get_tokenizer, replace_surrogates
from scripts import base_eval, base_train, export, sample
from scripts.report import make_report
from tests import training
from tests.finished import RUN, STEPS, copy
from tests.toy import examples, write_parquet


@pytest.fixture(scope="module", autouse=True)
def base(finished, tmp_path_factory):
    """A base directory with the finished run, and its exports hf/ and nc/."""
    with training.workplace(tmp_path_factory.mktemp("export").resolve(), **RUN) as path:
        copy(finished, path)
        assert export.main(["run", f"{path / 'hf'}", "--to=hf"]) == 0
        (path / "nc").mkdir()  # an empty folder is allowed
        assert export.main([f"run@{STEPS}", f"{path / 'nc'}", "--to=nanochat"]) == 0
        yield path


def weights(run):
    return training.as_bytes(dict(find_checkpoint(run).model_state()))


@functools.cache
def exported_tokenizer():
    exported = Tokenizer.from_file(str(get_base_dir() / "hf" / "tokenizer.json"))
    exported.encode_special_tokens = True
    return get_tokenizer(), exported


def test_the_models_code_names_the_version_of_transformers_that_it_needs(base, monkeypatch):
    old = types.ModuleType("transformers")
    old.__version__ = "4.57.1"
    monkeypatch.setitem(sys.modules, "transformers", old)
    with pytest.raises(
        ImportError, match=r"^This model's code needs transformers 5, but 4.57.1 is .*upgrade"
    ):
        exec((base / "hf" / f"{export.CODE}.py").read_text(), {})


# ---- the code of an export, with stand-ins for transformers --------------------------------------


@pytest.fixture
def exported(base):
    """The exported model with the run's weights, in float32."""
    code = export_check.load_code(Path(integrations.__file__).with_name(f"{export.CODE}.py"))
    config = json.loads((base / "hf" / "config.json").read_text())
    model = code.NanochatExactForCausalLM(code.NanochatExactConfig(**config)).eval()
    model.load_state_dict(load_file(base / "hf" / "model.safetensors"))
    return model


ROWS = torch.randint(320, (3, 40), generator=torch.Generator().manual_seed(0))
NUMBERS = torch.arange(40)[None]


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ({"rubbish": 1}, "rubbish: this model would ignore it; leave it out"),
        (
            {"token_type_ids": ROWS, "cu_seq_lens_q": ROWS},
            "token_type_ids, cu_seq_lens_q: this model would ignore it",
        ),
        (
            {"attention_mask": torch.zeros(3, 1, 40, 40)},
            r"got the shape \(3, 1, 40, 40\), expected \(3, 40\)",
        ),
        ({"attention_mask": torch.ones(3, 39)}, r"got the shape \(3, 39\), expected \(3, 40\)"),
        (
            {"position_ids": NUMBERS % 20},
            "position_ids: .* documents packed into a row would attend to each other",
        ),
        ({"inputs_embeds": torch.zeros(3, 40, 24)}, "inputs_embeds: .* so pass input_ids"),
        ({"input_ids": None}, "inputs_embeds: .* so pass input_ids"),
        (
            {"output_attentions": True},
            "output_attentions: attention is computed without storing its weights",
        ),
    ],
)
def test_an_argument_that_an_exported_model_cannot_honour_is_an_error(exported, argument, reason):
    """Regression: all of these gave wrong results without a word, or a traceback."""
    with pytest.raises(ValueError, match=reason) as e:
        exported(**{"input_ids": ROWS, "use_cache": False, **argument})
    assert "\n" not in str(e.value)


def test_an_exported_model_accepts_arguments_that_change_nothing(exported):
    padded = F.pad(torch.ones(3, 36, dtype=torch.int64), (4, 0))
    positions = (padded.cumsum(1) - 1).masked_fill(padded == 0, 1)
    plain = exported(ROWS, attention_mask=padded, use_cache=False).logits
    more = {
        "rubbish": None,
        "output_attentions": False,
        "position_ids": positions,
        "cache_position": NUMBERS[0],
    }
    assert torch.equal(exported(ROWS, attention_mask=padded, use_cache=False, **more).logits, plain)
    assert torch.equal(
        exported(ROWS, use_cache=False, return_dict=False)[0],
        exported(ROWS, use_cache=False).logits,
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_the_logits_of_an_exported_model(exported, side):
    lengths = [40, 25, 1]
    for row, length in zip(ROWS, lengths):
        at = slice(40 - length, None) if side == "left" else slice(length)
        ids, mask = torch.zeros(1, 40, dtype=torch.int64), torch.zeros(1, 40)
        ids[0, at], mask[0, at] = row[:length], 1
        padded = exported(ids, attention_mask=mask, use_cache=False).logits[:, at]
        alone = exported(row[None, :length], use_cache=False).logits
        assert (padded - alone).norm() <= 1e-5 * alone.norm()


class FakeLayer:
    def __init__(self):
        self.kept = None

    def update(self, keys, values):
        new = keys, values
        self.kept = (
            new if self.kept is None else [torch.cat(pair, dim=2) for pair in zip(self.kept, new)]
        )
        return self.kept


class FakeCache:
    """What the code needs of transformers' DynamicCache."""

    is_compileable = False

    def __init__(self):
        self.layers = [FakeLayer(), FakeLayer()]

    def get_seq_length(self):
        kept = self.layers[0].kept
        return 0 if kept is None else kept[0].size(2)

    def update(self, keys, values, layer):
        return self.layers[layer].update(keys, values)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_under_either_name_continues_a_row(exported, name, monkeypatch):
    """Regression: transformers 5.24 passes `cache`, which was ignored, so it generated from the
    last token alone."""
    monkeypatch.setitem(type(exported).forward.__globals__, "DynamicLayer", FakeLayer)
    cache, whole = FakeCache(), exported(ROWS, use_cache=False).logits
    parts = [
        exported(ROWS[:, a:b], **{name: cache}).logits for a, b in ((0, 30), (30, 31), (31, 40))
    ]
    assert (torch.cat(parts, dim=1) - whole).norm() <= 1e-5 * whole.norm()


def test_the_losses_of_micro_batches_add_up_to_the_loss_of_the_batch(exported):
    """Regression: Trainer passed num_items_in_batch, which was ignored, and steps became as many
    times too large as there were micro-batches."""
    labels = ROWS.clone()
    labels[0, :30] = -100
    num_items = (labels[:, 1:] != -100).sum()
    parts = [
        exported(ROWS[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=num_items).loss
        for i in range(3)
    ]
    assert exported.accepts_loss_kwargs
    assert sum(parts).item() == pytest.approx(exported(ROWS, labels=labels).loss.item(), rel=1e-5)


def test_an_exported_model_returns_the_output_of_each_layer(exported):
    states = exported(ROWS, use_cache=False, output_hidden_states=True).hidden_states
    logits = exported.lm_head(states[-1])[..., :320]
    assert len(states) == exported.config.n_layer + 1 and {state.shape for state in states} == {
        (3, 40, 24)
    }
    assert torch.equal(15 * torch.tanh(logits / 15), exported(ROWS, use_cache=False).logits)


def test_the_vocabulary_of_an_exported_model_cannot_be_resized(exported):
    assert exported.resize_token_embeddings(320) is exported.get_input_embeddings()
    with pytest.raises(ValueError, match="got 321, but this model has 320 tokens"):
        exported.resize_token_embeddings(321)


# ---- checks before an export is written ----------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "remedy"),
    [
        ("hf", f"make the same change to nanochat/integrations/{export.CODE}.py"),
        ("nanochat", "make the same change to gpt.py in nanochat"),
    ],
)
def test_a_model_whose_code_was_changed_is_not_exported(base, monkeypatch, to, remedy):
    """Regression: the README's own hack was exported, and transformers computed other logits."""
    monkeypatch.setattr(gpt.MLP, "forward", lambda self, x: self.c_proj(F.silu(self.c_fc(x))))
    error = refused("run", base / "new", f"--to={to}")
    assert error.startswith(f"--to {to}: ") and "computes other logits" in error and remedy in error


@pytest.mark.parametrize(
    ("name", "value"), [("QK_SCALE", 2.0), ("LOGIT_CAP", 30.0), ("ROPE_BASE", 100)]
)
def test_a_changed_constant_travels_to_transformers_but_not_to_nanochat(
    base, monkeypatch, name, value
):
    code = Path(integrations.__file__).with_name(f"{export.CODE}.py")
    config = load_model("run", "cpu")[0].config
    before = export.model_files(config, torch.float32, 0)["config.json"]
    monkeypatch.setattr(gpt, name, value)
    model = load_model("run", "cpu", compute_dtype=torch.float32)[0]
    export_check.check_hf(
        model, code, json.loads(export.model_files(config, torch.float32, 0)["config.json"])
    )
    with pytest.raises(ValueError, match="computes other logits"):
        export_check.check_hf(model, code, json.loads(before))
    with pytest.raises(ValueError, match="computes other logits"):
        export_check.check_nanochat(model)


def test_a_change_of_the_windows_is_not_exported_to_nanochat(base, monkeypatch):
    config = gpt.GPTConfig(
        sequence_len=300, vocab_size=100, n_layer=2, n_head=2, n_kv_head=2, n_embd=24
    )

    def check():
        model, rng = gpt.GPT(config), torch.Generator().manual_seed(0)
        model.init_weights(seed=0, compute_dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():  # also those that are zero at first
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng))
        export_check.check_nanochat(model)

    check()
    monkeypatch.setattr(gpt.GPTConfig, "window_sizes", [10, 300])
    with pytest.raises(ValueError, match="computes other logits"):
        check()


def test_a_model_with_other_parameters_is_not_exported(base, monkeypatch):
    """Regression: a SwiGLU was exported, and could not be loaded."""
    model = load_model("run", "cpu", compute_dtype=torch.float32)[0]
    model.transformer["h"][0].mlp.c_gate = torch.nn.Linear(24, 96, bias=False)
    monkeypatch.setattr(export, "load_model", lambda *args, **kwargs: (model, None, {}))
    assert (
        "cannot load this model (" in (error := refused("run", base / "new", "--to=hf"))
        and "c_gate" in error
    )
    error = refused("run", base / "new", "--to=nanochat")
    assert "nanochat's gpt.py does not know transformer.h.0.mlp.c_gate.weight" in error


def test_checking_an_export_leaves_no_stand_in_for_transformers(exported):
    assert "transformers" not in sys.modules


# ---- out -----------------------------------------------------------------------------------------


def test_exported_weights_are_those_of_the_checkpoint_in_one_file_or_in_several(
    base, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    assert training.as_bytes(load_file(base / "hf" / "model.safetensors")) == weights("run")
    export.write_weights(tmp_path, find_checkpoint("run").model_state(), shard_bytes=40_000)
    assert not caplog.messages, "a message would name the temporary folder"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2 and {path.name for path in tmp_path.glob("model-*.safetensors")} == files
    tensors = {name: load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()}
    assert training.as_bytes(tensors) == weights("run")
    assert (base / "hf" / "model.safetensors").stat().st_mode & 0o777 == 0o644, "others may read it"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


@settings(max_examples=examples(0.7))
@given(st.text("ab '<|bos|>19\n\r\t é漢\u0301\u1680😀"))
@example("<|bos|><|user_start|> aaaaaaaaa'S'ſ   \n  x")
@example("\n\n".join(training.texts(200, seed=7)))
def test_the_exported_tokenizer_gives_our_ids(text):
    ours, theirs = exported_tokenizer()
    text = replace_surrogates(text)
    ids = ours.encode(text)
    assert theirs.encode(text, add_special_tokens=False).ids == ids
    assert theirs.encode(text).ids == [ours.bos_token_id, *ids], "BOS begins every text"
    assert theirs.decode(ids, skip_special_tokens=False) == text
    assert {
        text: theirs.token_to_id(text) for text in ours.get_special_tokens()
    } == ours.enc._special_tokens
    assert theirs.get_vocab_size() == ours.get_vocab_size()


def test_another_programs_tokenizer_is_exported_with_its_end_of_documents_in_front(
    base, tmp_path, caplog
):
    library = ByteLevelBPETokenizer()
    library.train_from_iterator(
        training.texts(20, seed=1), vocab_size=300, special_tokens=["<end>"]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = get_tokenizer(tmp_path, eod_token="<end>")
    exported = Tokenizer.from_str(export.tokenizer_files(tokenizer, 64)["tokenizer.json"].decode())
    assert exported.encode("a b").ids == [tokenizer.bos_token_id, *tokenizer.encode("a b")]
    assert (
        export.tokenizer_files(get_tokenizer("ids:300:7"), 64) == {}
        and "with 7 in front" in caplog.text
    )


def test_a_tokenizer_whose_ids_would_differ_is_not_exported(base):
    class Other(RustBPETokenizer):
        def encode(self, text, **kwargs):
            return [0, *super().encode(text, **kwargs)]

    with pytest.raises(ValueError, match="and tiktoken give different ids"):
        export.as_tokenizers(Other(get_tokenizer().enc, "<|bos|>"))


def test_config_and_card_describe_the_model(base):
    config = json.loads((base / "hf" / "config.json").read_text())
    checkpoint = find_checkpoint("run")
    assert checkpoint.model_config.items() <= config.items()
    assert config["window_sizes"] == [128, 64], (
        "the windows of a short and of a long layer, for 64 tokens"
    )
    assert config["auto_map"]["AutoModelForCausalLM"] == f"{export.CODE}.NanochatExactForCausalLM"
    code = Path(f"nanochat/integrations/{export.CODE}.py").read_bytes()
    assert (base / "hf" / f"{export.CODE}.py").read_bytes() == code
    card = (base / "hf" / "README.md").read_text()
    [val] = [event["bpb"] for event in training.events("val") if event["step"] == STEPS]
    for fact in (
        training.digests()[-1],
        f"{val:.6f}",
        "4,096",
        checkpoint.seal["checksum"],
    ):
        assert fact in card, fact
    assert str(base) not in card, "no path of this machine"


def test_the_bits_per_byte_of_an_export_are_those_of_its_step_or_name_theirs(base, tmp_path):
    """Regression: the card of step 6, and nanochat's meta, had the value of step 4."""
    [older] = [event["bpb"] for event in training.events("val") if event["step"] == 4]
    checkpoint = find_checkpoint("run@6")
    card = export.model_card(checkpoint, RunReader(training.run_dir()), 1).decode()
    assert f"| validation bits per byte, at step 4 | {older:.6f} |" in card

    def meta(out):
        assert export.main(["run@6", f"{out}", "--to=nanochat"]) == 0
        return json.loads((out / "base_checkpoints/run/meta_000006.json").read_text())

    assert meta(tmp_path / "older")["val_bpb"] is None
    result = training.run_dir() / "eval.json"
    write_json(
        result, {"step": 6, "eval_tokens": 64, "val_bpb": 2.5, "train_bpb": {}, "samples": {}}
    )
    card = export.model_card(checkpoint, RunReader(training.run_dir()), 1).decode()
    assert "| validation bits per byte, on 64 tokens | 2.500000 |" in card
    assert meta(tmp_path / "evaluated")["val_bpb"] == 2.5
    result.unlink()


def test_the_code_and_the_settings_of_a_card_are_those_of_its_steps(base):
    """Regression: they were those of the launch that began at its step, or of the newest one."""
    training.succeed(model_tag="moved", num_iterations=4)
    training.succeed(model_tag="moved", num_iterations=6, eval_every=1)
    log = training.run_dir("moved") / "logs" / "train.jsonl"
    first, *_, later = [line for line in log.read_text().splitlines() if '"started"' in line]
    coded = [
        {**json.loads(line), "code": code, "model_code": {"nanochat/gpt.py": code * 32}}
        for line, code in ((first, "old"), (later, "new"))
    ]
    text = log.read_text()
    for line, record in zip((first, later), coded):
        text = text.replace(line, json.dumps(record))
    log.write_text(text)
    run = RunReader(training.run_dir("moved"))
    card = export.model_card(find_checkpoint("moved@4"), run, 1).decode()
    assert "| code, commit | old |" in card and "| eval_every | 4 |" in card
    assert "model code" not in card
    card = export.model_card(find_checkpoint("moved"), run, 1).decode()
    assert "code, commit | new" in card
    assert "Launch 2 began at step 4 with other model code: nanochat/gpt.py." in card


def test_the_card_of_a_fork_names_its_ancestors_its_split_and_what_it_left_out(base):
    """Regression: it read as if all files had been trained on, and as if validation were training."""
    training.succeed(model_tag="first", val_fraction=0.1, num_iterations=3, save_every=1)
    training.succeed(model_tag="warm", fork_from="first@1", matrix_lr=0.5)
    (base / "some.txt").write_text("shard_1.parquet:*\n")
    training.succeed(model_tag="bare", fork_from="warm@2", without_documents=base / "some.txt")
    assert export.main(["bare", f"{base / 'bare-hf'}", "--to=hf"]) == 0
    card = (base / "bare-hf" / "README.md").read_text()
    for words in (
        "It is a fork of warm@2 ",
        'without_documents null -&gt; "some.txt". warm is a fork of first@1 ',
        "matrix_lr 0.02 -&gt; 0.5",
        "From step 2 on, --without-documents left out 1 whole file (shard_1.parquet).",
        "validation reads 0.1 of each, training the rest",
        "| documents of this split |",
        '| data_path | "data" | null |',
        "| depth | 2 | 20 |",
    ):
        assert words in card, card
    assert str(base) not in card, "no path of this machine"


def test_the_card_of_a_fork_does_not_say_whether_its_parent_is_on_this_machine(monkeypatch):
    """Regression: it said "which is not here", wherever the card was read."""
    training.succeed(model_tag="child", fork_from="run@4", num_iterations=5)
    monkeypatch.setattr(RunReader, "parent_dir", None)
    card = export.model_card(find_checkpoint("child"), RunReader(training.run_dir("child")), 1)
    assert b"It is a fork of run@4 " in card and b"not here" not in card


# ---- in ------------------------------------------------------------------------------------------


def test_an_export_to_nanochat_is_imported_with_equal_weights_and_bits_per_byte(base, caplog):
    assert (
        export.main(
            [
                f"{base / 'nc/base_checkpoints/run'}",
                "--from=nanochat",
                "--model-tag=back",
                f"--data-path={base / 'data'}",
            ]
        )
        == 0
    )
    assert weights("back") == weights("run")
    imported, trained = (find_checkpoint(name).seal for name in ("back", "run"))
    assert imported["model_code"] == trained["model_code"]
    (base / "data").rename(base / "away")
    assert (
        export.main(
            [f"{base / 'nc/base_checkpoints/run'}", f"{base / 'elsewhere'}", "--from=nanochat"]
        )
        == 0
    )
    (base / "away").rename(base / "data")
    assert (
        weights(str(base / "elsewhere")) == weights("run")
        and "base_eval cannot evaluate the run" in caplog.text
    )
    assert (
        base_eval.main(["back", "--eval-tokens=1024", "--unigram-tokens=512", "--device-type=cpu"])
        == 0
    )
    result = json.loads((training.run_dir("back") / "eval.json").read_text())
    assert result["val_bpb"] == training.events("val")[-1]["bpb"] and result["step"] == STEPS
    [meta] = (base / "nc/base_checkpoints/run").glob("meta_*.json")
    assert json.loads(meta.read_text())["val_bpb"] == result["val_bpb"]
    back = RunReader(training.run_dir("back"))
    assert "Its weights are imported" in make_report(back), "regression: nothing saved yet"
    fork = training.refuse(model_tag="fork", fork_from="back", num_iterations=STEPS + 1)
    assert "--init-from=back" in fork
    assert sample.main(["back", "--max-tokens=2", "--device-type=cpu"]) == 0
    assert (
        base_train.main(
            training.flags(model_tag="next", init_from="back", num_iterations=1, eval_every=1)
        )
        == 0
    )
    assert training.events("val", "next")[0]["bpb"] == result["val_bpb"]


def copy_of(exported, name):
    """The files of the only checkpoint (weights, meta) in a copy of an export for nanochat."""
    folder = shutil.copytree(exported, exported.with_name(name)) / "base_checkpoints" / "run"
    return folder / f"model_{STEPS:06d}.pt", folder / f"meta_{STEPS:06d}.json"


def test_an_older_checkpoint_of_nanochat_gets_the_values_that_it_lacks(base):
    file, meta_file = copy_of(base / "nc", "older")
    state, meta = torch.load(file), json.loads(meta_file.read_text())
    torch.save(
        {f"_orig_mod.{name}": value for name, value in state.items() if name[-8:] != "_lambdas"},
        file,
    )
    del meta["model_config"]["window_pattern"]
    meta_file.write_text(json.dumps(meta))
    checkpoint = export.from_nanochat(str(file.parent))
    assert checkpoint.config["window_pattern"] == "L" and checkpoint.state.keys() == state.keys()
    assert checkpoint.state["resid_lambdas"].tolist() == [1, 1] and checkpoint.state[
        "x0_lambdas"
    ].tolist() == [0, 0]


def test_nanochats_own_download_is_the_default_data_unless_ours_exists(base_dir):
    write_parquet(base_dir / "base_data_climbmix" / "shard_00000.parquet", ["a"])
    assert default_data_dir() == base_dir / "base_data_climbmix"
    (base_dir / "data" / "climbmix").mkdir(parents=True)
    assert default_data_dir() == base_dir / "data" / "climbmix"


# ---- refused -------------------------------------------------------------------------------------


def refused(*argv):
    """The error of a command, which leaves nothing in the base directory."""
    before = sorted(get_base_dir().rglob("*"))
    with pytest.raises((ValueError, OSError)) as e:
        export.main([str(arg) for arg in argv])
    assert sorted(get_base_dir().rglob("*")) == before
    assert "\n" not in str(e.value)
    return str(e.value)


@pytest.mark.parametrize("to", ["hf", "nanochat"])
def test_an_existing_folder_is_refused_before_a_step_is_replayed(base, monkeypatch, to):
    monkeypatch.setattr(export, "make_available", lambda source: 1 / 0)
    assert "runs: already exists" in refused("run@1", base / "runs", f"--to={to}")


def test_nothing_is_overwritten_and_no_partial_output_stays(base, monkeypatch):
    error = refused(
        base / "nc/base_checkpoints/run", "--from=nanochat", f"--data-path={base / 'data'}"
    )
    assert "runs/run: already exists" in error and "name another run with --model-tag" in error

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "write_weights", full)
    assert "No space left" in refused("run", base / "new", "--to=hf")


@pytest.mark.parametrize("package", ["safetensors.torch", "tokenizers", "huggingface_hub"])
def test_a_package_that_cannot_be_imported_names_its_extra(base, monkeypatch, package):
    """Regression: a ModuleNotFoundError for a package that was installed in part."""

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    error = refused("run", base / "new", "--to=hf")
    assert "cannot be imported" in error and error.endswith("pip install -e '.[hf]'")


def test_other_architectures_and_damaged_checkpoints_are_one_sentence(base):
    file, meta = copy_of(base / "nc", "other")
    whole, shape = torch.load(file), json.loads(meta.read_text())["model_config"]

    def imported(state=whole, config=shape, step=STEPS):
        torch.save(state, file)
        meta.write_text(json.dumps({"model_config": config}))
        return refused(
            f"{file.parent}@{step}",
            "--from=nanochat",
            f"--tokenizer={base / 'tokenizer'}",
            "--model-tag=x",
            f"--data-path={base / 'data'}",
        )

    error = imported({name: value for name, value in whole.items() if not name.startswith("smear")})
    assert all(
        text in error
        for text in ("Missing key(s) in state_dict", '"smear_lambda"', '"smear_gate.weight"')
    )
    error = imported(whole | {"bias": torch.zeros(1), "smear_lambda": torch.zeros(3)})
    assert (
        'Unexpected key(s) in state_dict: "bias"' in error and "mismatch for smear_lambda" in error
    )
    assert "n_kv_head is 1" in imported(config=shape | {"n_kv_head": 1})
    assert "320 tokens, but the model has 500" in imported(config=shape | {"vocab_size": 500})
    assert "does not fit our model" in imported(config={"layers": 3})
    assert "steps in it: 8" in imported(step=7)
    file.write_bytes(pickle.dumps(Trap(base / "trapped")))
    assert "refused" in refused(file.parent, "--from=nanochat") and not (base / "trapped").exists()


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_model_that_nanochat_cannot_represent_is_refused(base):
    assert (
        base_train.main(
            training.flags(model_tag="narrow", depth=1, num_iterations=1, eval_every=-1)
        )
        == 0
    )
    assert "n_embd is 12" in refused("narrow", base / "new", "--to=nanochat")
