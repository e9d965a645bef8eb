"""Prefix resolver, splice, capture core, completion stager, ledger and collector."""
