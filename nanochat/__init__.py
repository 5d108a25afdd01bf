"""
The map of this package. Importing it does nothing.

The core, in reading order: from a text to an update of the weights.

    tokenizer        text to ids and back
    packing          document lengths to rows: what goes where, without a token in sight
    rows             placements and ids to rows: tokens, and which of them are targets
    order            which lane reads which documents when
    stream           the tokens in row k of lane l, whatever the number of processes
    dataloader       rows to batches on the device
    gpt              the model; `attention` and `fp8` are parts of it
    reduce           gradients of all ranks, added in one fixed order
    optim            Muon and AdamW, sharded over the ranks
    trainer          one step of all ranks, and the state that a run carries

Files and text:

    files            what a data path names             pins             what a run stores about its files
    sources          files behind one interface
    splits           training, validation, buckets      parquet_source   text from parquet (spill: large groups)
    text             which documents are read           token_source     documents from token files
    text_kinds       jsonl, txt, arrow, ...             tokens           the format of token files
    prepare          other text to parquet, once        pretokenize      text to token files, once
    dataset          nanochat's names; download

The stream: `curriculum` mixes buckets, `plan` says when one runs dry (in words: `plan_report`),
`find` where a document is; `seen` (with `ngrams`) which items of a benchmark a run has trained on;
in words: `find_report`, `seen_report`, `spike_report`.

Training: `schedule`, `spikes`, `steps` (plain values), `loss_eval` and `evaluations` (between steps),
`core_eval` (CORE), `engine` (generation).

A run, from its command to its end:

    config           the settings                       run_owner        which launch owns a run
    run_settings     what follows from them             run_stop         why a run stops
    run_order        what they mean for the data        run_guard        what protects a launch
    start_run        how a run starts or resumes        watchdog         ends a launch that hangs
    run_summary      what a launch prints first         run_saves        when a run saves
    run_dir          the folders and files of a run     checkpoint       what a save writes, and reads
    run_journal      where steps and events go          run_state        where a run stands
    run_reader       what a run recorded                sinks            trackers, and a fork's own
    fork             a run that continues another       run_history      forks: who took which step
    run_curves       its log as curves                  any_step         RUN@STEP, saved or not
    run_stream       its rows at any step               run_uses         which steps used a document
    receipt          proof for others                   receipt_check    its check
    mirror           a copy of the run elsewhere        mirror_owner     who may write that copy
    mirror_store     where it lies                      mirror_marks     what it holds of each save
    mirror_fetch     from it to an empty machine        run_facts        a run in words and tables

The loop is in scripts/base_train.py. Threads of a rank: the main one, the loader's (dataloader), the
tokenizers' pool (stream), the watchdog's two, one that waits for a second Ctrl-C (run_stop), and
pools that read or write several files (common); on rank 0 also the saver's, the mirror's and, at the
end, one that writes the last state (run_owner).

The floor: `common` (files, JSON, hashes), `cli` (flags; `old_flags`), `dist` (processes), `model_code`
(whether a model's code has changed).

`integrations/` connects to other programs, behind the doors that dev/ARCHITECTURE.md lists.
"""
