"""The proof of live rescaling."""
