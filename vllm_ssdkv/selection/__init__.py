"""Which part of a context a query needs: one file per selector behind one protocol."""
