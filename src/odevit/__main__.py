"""`python -m odevit …`, and `torchrun … -m odevit train …`."""

from odevit_cli import main

main()
