"""Every option of the product: typed, frozen, validated, and documented where it is declared."""
