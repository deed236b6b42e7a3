"""NumPy truth: the DDTree algorithm, a DeepSeek-V3/Kimi-K2-style target, the DFlash drafter and the decode loops."""
