"""GRPO by hand: open grpo/loop.py first."""
