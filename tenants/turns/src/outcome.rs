//! The result of a switch.

use tenants::coordinator::Outcome;
use tenants::identity::TenantName;

/// The changes that a switch has made, or would make.
#[derive(Clone, Debug)]
pub struct Switched {
    /// Did the tenant have its GPUs already?
    pub had_them: bool,
    /// The tenants that were paused, or would be.
    pub victims: Vec<TenantName>,
    /// The reasons, one line each.
    pub reasons: Vec<String>,
    /// The outcome of each pause and of the resume, in order.
    pub changes: Vec<(TenantName, Outcome)>,
    /// The switch is done, but could not be recorded for later decisions, for this reason.
    pub unrecorded: Option<String>,
}
