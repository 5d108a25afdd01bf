"""
The plan of a run in Megatron's order: how many samples it takes of each prefix, and how many passes over it that is.

    samples of the run --Mixture--> of each prefix --x T--> tokens  --/ tokens of its train split--> passes

All of it follows from lengths and weights, so it is exact and takes the time of opening the files: no token is read
and nothing is shuffled. No bucket can run dry: a run that takes more samples than there are does not start.
"""

from collections.abc import Mapping

from nanochat.blend import SampleConfig, account, open_samples
from nanochat.common import hash_json
from nanochat.plan import BucketPlan, Plan
from nanochat.sources import Source
from nanochat.stream import ledger


def plan_samples(config: SampleConfig, sources: Mapping[str, Source], *, rows_per_step: int, num_steps: int, taken: int
                 ) -> Plan:
    """The plan of `num_steps` steps in all, which take so many samples. ValueError as of `open_samples`."""
    samples = open_samples(config, sources)
    T = config.T
    buckets = {}
    for name, part, count in zip(sources, samples.datasets, samples.counts(taken)):
        epoch = part.num_tokens_per_epoch
        buckets[name] = BucketPlan(
            documents=len(part.indices), tokens=epoch, max_epochs=part.order.num_epochs, asked=count * T,
            trained=count * T, usable=len(part) * T, dry_step=None, dry_lanes=0, exact=True,
            account=ledger([{"buckets": {name: account(count, count * T // epoch, T)}}], T)[name])
    phase = {"first_step": 0, "tokens": taken * T, "asked": {name: b.trained for name, b in buckets.items()}}
    told = {"taken": taken, "there": config.num_samples, "epochs": [part.order.num_epochs for part in samples.datasets]}
    key = hash_json([config.identity(), samples.identity(), rows_per_step, num_steps, taken,
                     [source.fingerprint for source in sources.values()]])
    return Plan(key=key, estimate=False, crops=False, T=T, V=config.V, rows_per_step=rows_per_step,
                num_steps=num_steps, steps=num_steps, halt="", allowed=False, phases=[phase], buckets=buckets,
                samples=told)
