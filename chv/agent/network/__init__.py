"""Networks: made and deleted through nwd."""
