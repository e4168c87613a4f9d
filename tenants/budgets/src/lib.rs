//! Budgets: the device memory that a tenant may hold on each GPU, and the count of the memory of all its processes.
//!
//! ```text
//!   text      budgets as people write them      gpus    the numbers of this machine's GPUs
//!   slots     the rule by which one may take    shared  the slots of all processes, in memory that they share
//!   file      the tenant's file of them         counting  the part of one process: a member's `Counting`, and an `Account` of its pool
//!   report    budgets asked and changed, while processes run
//! ```
//!
//! This crate takes no part in pauses and resumes.

mod counting;
mod file;
pub mod gpus;
mod report;
mod shared;
pub mod slots;
mod text;

pub use counting::{Counts, figure_of, may_count};
pub use report::{BudgetReport, budgets, change, with_budgets};
pub use text::{BUDGET_VARIABLE, BudgetError, Budgets, TEXT_BYTES_MAX, Which, uuid};
