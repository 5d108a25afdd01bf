#!/usr/bin/env bash
# End to end with other programs: a jsonl.zst with text in a nested field and a tokenizer.json become token files, a
# trained run, a report and an export; the oldest and the newest transformers generate text from it, and lm-eval scores
# it.
#
#   [HF_PYTHON="OLD/bin/python NEW/bin/python"] bash dev/e2e_interop.sh
#
# HF_PYTHON: environments with torch, transformers, lm-eval and accelerate. By default, two are created in the temporary
# folder that holds all output, with transformers 5.0.0 and with the newest one, which takes a package index and about
# two gigabytes.
# Cost: nothing. Hardware: 2 cores. Duration: under 8 minutes plus installs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -d .venv ]] || bash dev/setup.sh
source .venv/bin/activate
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export NANOCHAT_BASE_DIR=$work/base HF_HOME=$work/hf
if [[ -z ${HF_PYTHON:-} ]]; then
    for version in "==5.0.0" ""; do
        python -m venv "$work/venv$version"
        "$work/venv$version/bin/python" -m pip install --quiet "torch==2.13.0" "transformers$version" lm-eval accelerate
        HF_PYTHON+=" $work/venv$version/bin/python"
    done
fi

python - "$work" <<'PY'
import ast
import json
import sys
import sysconfig
from pathlib import Path

import pyarrow as pa
from tokenizers import ByteLevelBPETokenizer

work, library = Path(sys.argv[1]), Path(sysconfig.get_path("stdlib"))
texts = [path.read_text(errors="replace") for path in sorted(library.glob("*.py"))]
topics = ast.literal_eval((library / "pydoc_data" / "topics.py").read_text().partition("topics = ")[2])
texts = sorted(topics.values()) + texts
lines = [json.dumps({"id": i, "page": {"body": text}}) + "\n" for i, text in enumerate(texts)]
(work / "raw").mkdir()
(work / "raw" / "pages.jsonl.zst").write_bytes(pa.compress("".join(lines).encode(), "zstd", asbytes=True))
tokenizer = ByteLevelBPETokenizer()
tokenizer.train_from_iterator(texts[:150], vocab_size=2000, special_tokens=["<|endoftext|>"], show_progress=False)
(work / "theirs").mkdir()
tokenizer.save(str(work / "theirs" / "tokenizer.json"))
PY

python -m scripts.tok_shards --input-dir "$work/raw" --output-dir "$work/shards" --text-field page.body \
    --val-fraction 0.1 --tokenizer "$work/theirs/tokenizer.json" --num-workers 1
python -m scripts.verify "$work/shards"

python -m scripts.base_train --data-path "$work/shards" --data-format shards --model-tag interop --depth 4 \
    --long-docs split --aspect-ratio 16 --head-dim 16 --max-seq-len 256 --device-batch-size 16 --total-batch-size 4096 \
    --num-iterations 60 --eval-every 30 --eval-tokens 32768 --sample-every -1 --device-type cpu \
    --matrix-lr 0.16 --embedding-lr 2.4 --unembedding-lr 0.064

python -m scripts.base_eval interop --eval-tokens 32768 --device-type cpu
python -m scripts.report interop

python -m scripts.export interop "$work/model" --to hf
ls -l "$work/model"
for hf_python in $HF_PYTHON; do
    "$hf_python" - "$work/model" <<'PY'
import sys

import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
tokens = model.generate(**tokenizer("The return value of", return_tensors="pt"), max_new_tokens=40)
text = tokenizer.decode(tokens[0], skip_special_tokens=True)
print(f"transformers {transformers.__version__}: {text!r}")
PY
    python -m dev.compare_hf interop --hf-python "$hf_python"
done
