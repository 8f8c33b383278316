"""Support for older names: config keys, names of plugins' objects, and modules. A later release removes it."""
