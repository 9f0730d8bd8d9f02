"""The recall model: a task whose answers need the whole context."""
