"""The proof of streams that programs push."""
