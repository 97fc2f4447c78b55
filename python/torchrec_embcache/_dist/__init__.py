"""Ranks and collectives."""
