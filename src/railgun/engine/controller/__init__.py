"""The lifecycle controller of a flow, in the program that started it: orders workers, tells people."""
