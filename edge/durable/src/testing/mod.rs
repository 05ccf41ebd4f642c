//! For tests of stores: the conformance suite every adapter passes, and a store that fails where it is told to.
