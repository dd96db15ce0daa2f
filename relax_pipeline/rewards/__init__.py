"""Scorers: from one completion to one number."""
