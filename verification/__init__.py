"""The proof of Railgun: explorers, models, mutants, simulators and fault runs. Not shipped."""
