"""What trainers of several backbones share beyond `astuner.training.objective`: modules that need torch when imported.

The one place of the core where they may be, and therefore imported by running backbones only: never by the rest of
the core, nor by what lists plugins.  `optim_settings` is light, for what only describes a run.
"""
