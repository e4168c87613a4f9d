//! Tenants: identity, the agent in each process, and the protocol that pauses and resumes them together.

pub mod identity;
pub mod wire;
