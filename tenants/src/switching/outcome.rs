//! What a switch came to.

use crate::coordinator::Outcome;
use crate::identity::TenantName;

/// What was done, or would be.
#[derive(Clone, Debug)]
pub struct Switched {
    /// Did the tenant have its GPUs already?
    pub had_them: bool,
    /// Who was paused, or would be.
    pub victims: Vec<TenantName>,
    /// Why, one line each.
    pub reasons: Vec<String>,
    /// How each pause and the resume went, in order.
    pub changes: Vec<(TenantName, Outcome)>,
    /// All of this is done, and could not be written down for later decisions, and why not.
    pub unrecorded: Option<String>,
}
