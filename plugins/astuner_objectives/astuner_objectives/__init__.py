"""Losses and advantage estimators from the literature, and code that trainers share."""
