"""Function tools: what requests say of them, and how each model line writes its calls."""
