//! A member against clients and owners that send what they should not, or nothing at all.

mod clients;
mod owners;
mod stage;
