"""Code that connects to other programs. Each part is loaded on demand, by one function of the core.

A run that trains from parquet with no extras installed loads nothing from this folder.
"""
