"""Code that connects to other programs. The core imports each module lazily, through one function.

A run on parquet files without extras imports nothing from this folder.
"""
