"""The quality lab: real gradients in virtual time, under the production protocol.

How a study goes, from a question to a figure on a page:

1. settings: an experiment is a TOML file (`experiment`). A list in it is a sweep; each run has all its settings
   (`settings`).
2. runs: `diloco lab run FILE` does those that are not done yet, several at a time (`sweep`, `engine`). The task is
   `text`, or `vision` or `captions` of digits (`tasks`). The production protocol trains it (`decoupled`,
   with `learner` and `bus`), or one loop does (`synchronous`). Both live in the world of `schedule`, and both fill a
   `Recorder` (`curve`).
3. raw results: a JSON file a run, in a folder of the user's choice that no repository keeps (`results.store`). Its name
   is a digest of settings, data and code (`results.source`), so that nothing is run twice or taken for something else.
4. CSV: `diloco lab report FILE --csv PAGE.csv` keeps what tables and pictures need of each run (`results.summary`).
5. table and picture: `diloco lab report FILE` prints one of the raw results, or `--from PAGE.csv` (`results.report`);
   `--plot` draws it (`results.plot`).
"""
