//! Pure arithmetic: which bytes of which file go where. No I/O.
