//! The result of a switch.

use tenants::coordinator::Outcome;
use tenants::identity::TenantName;

/// The work that a switch has done, or would do.
#[derive(Clone, Debug)]
pub struct Switched {
    /// Did the tenant have its GPUs already?
    pub had_them: bool,
    /// The tenants that were paused, or would be.
    pub victims: Vec<TenantName>,
    /// Why, one line each.
    pub reasons: Vec<String>,
    /// The outcome of each pause and of the resume, in order.
    pub changes: Vec<(TenantName, Outcome)>,
    /// All of this is done, and could not be written down for later decisions, and why not.
    pub unrecorded: Option<String>,
}
