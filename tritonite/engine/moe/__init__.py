"""Mixtures of experts: the choice of experts, the sort of tokens by expert, and the exchange of rows.

`routing` chooses experts by scores, `grouping` sorts tokens by expert, `exchange` moves rows to their experts and back,
`groups` finishes products of groups of rows, and `balance` computes the loss that balances the load of experts.
"""
