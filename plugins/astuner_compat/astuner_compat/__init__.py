"""What is only for older spellings: keys, names of plugins' things, and modules. Goes with a later release."""
