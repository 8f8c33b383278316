"""Rubrics learned from labelled examples: propose, grade, validate, revise; then select those that cover the labels.

The algorithm follows "Auto-Rubric: Learning to Extract Generalizable Criteria for Reward Modeling" (arXiv 2510.17314).
"""
