"""The rules of Troth: pure functions over state and messages. No clock, socket, file, randomness, torch or web3."""
