"""Integrations with Lightning and Megatron-Core."""
