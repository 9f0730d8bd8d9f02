"""Accuracy of sparse decode on real text: documents, suites of questions, and their scores."""
