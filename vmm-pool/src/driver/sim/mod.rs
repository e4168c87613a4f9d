//! The simulated driver. (Written next.)
