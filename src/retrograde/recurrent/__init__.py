"""RNN, GRU and LSTM within a budget: modules, their core, its bytes and its plan."""
