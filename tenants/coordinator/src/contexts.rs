//! The door for a crate that takes the contexts of processes off the devices behind a pause, and brings them back before a resume. It has the
//! processes, the orders and the account of a [`Session`] for that. Without it deep pauses are refused, and so are the resumes of their tenants.

use std::fmt;

use super::report::MemberFailure;
use super::session::Session;

/// The way to the contexts of a tenant's processes. From any thread; each call blocks for a bounded time.
pub trait Contexts: fmt::Debug + Send + Sync {
    /// Fails, with why, where a deep pause would not come to its end. Nothing has moved yet.
    ///
    /// # Errors
    /// For people.
    fn check(&self, leg: &Session<'_>) -> Result<(), String>;

    /// The pause of all members that are not lost is complete: takes the contexts of all. What failed is in the report, and all are paused.
    fn take(&self, leg: &mut Session<'_>);

    /// All members stand paused: takes the contexts that are still there, as [`Contexts::take`]. Returns false when there are none.
    fn take_rest(&self, leg: &mut Session<'_>) -> bool;

    /// Brings the contexts of members back that stand `deep`, for a resume, and adds what came of it to the report.
    ///
    /// # Errors
    /// Those that lack them still. All stand as before, as far as the driver does its part.
    fn bring_back(&self, leg: &mut Session<'_>, deep: &[usize]) -> Result<(), Vec<MemberFailure>>;

    /// A resume came to nothing: takes those again that it has brought back, by its report.
    fn take_again(&self, leg: &mut Session<'_>);
}
