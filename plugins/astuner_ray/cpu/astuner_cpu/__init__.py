"""Replacements for a GPU, shared by the CPU packages of the VERL and Trinity backbones."""
