"""The shared language of the stages: config, batches, media, references and errors.

In: nothing. Out: types every stage imports. Imports neither flytekit nor, in `config` and `refs`, torch.
"""
