//! The gate, its slots, those of budgets and the cut of the product, compiled over loom.
//!
//! These are the files of `vmm-pool` and `tenants` themselves, not copies: only [`sync`], where they take their
//! atomics and locks from, is another. What loom finds here it finds in the product. The models are in `tests/`.

// The files of the cut name the crate of locks.
extern crate self as sublet_sync;

// Not when this crate is compiled as a test: the unit tests in these files stay at home.
#[cfg(not(test))]
#[path = "../../../tenants/cut/src/lib.rs"]
pub mod cut;
#[cfg(not(test))]
#[path = "../../../vmm-pool/src/gate.rs"]
pub mod gate;
#[cfg(not(test))]
#[path = "../../../vmm-pool/sync/src/slots.rs"]
pub mod slots;
#[cfg(not(test))]
#[path = "../../../tenants/budgets/src/slots.rs"]
pub mod slots_of_budget;
#[cfg(not(test))]
pub mod sync;
#[cfg(not(test))]
#[path = "../../../vmm-pool/sync/src/time.rs"]
pub mod time;

/// Runs `model` in every interleaving with up to `preemptions` switches away from a thread that could go on.
/// Switches where a thread waits, yields or ends are not counted.
///
/// # Panics
/// Where an interleaving breaks what the model asserts, races, or leaves all threads waiting for ever.
pub fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// What the pool does with its gate, for models: outside it only a proof shuts and opens one.
#[cfg(not(test))]
pub mod keeper {
    use std::time::Instant;

    use crate::gate::{Gate, Mode, StillInside};

    /// Shuts the gate, and waits until all are out.
    ///
    /// # Errors
    /// [`StillInside`], with the gate as before.
    pub fn shut(
        gate: &Gate,
        deadline: Instant,
        called_off: impl Fn() -> bool,
    ) -> Result<(), StillInside> {
        gate.shut(deadline, called_off).map(|_| ())
    }

    /// Shuts the gate, and waits for nobody.
    pub fn close(gate: &Gate) {
        gate.close();
    }

    /// Lets each thread that waits make one call.
    pub fn step(gate: &Gate) {
        gate.step(|_| true);
    }

    /// Is nobody inside, or let in and on its way?
    pub fn is_clear(gate: &Gate) -> bool {
        gate.inside() == 0
    }

    /// Memory is away, and nothing moves.
    pub fn offload(gate: &Gate) {
        gate.set(Mode::Offloaded);
    }

    /// All memory is there.
    pub fn open(gate: &Gate) {
        gate.set(Mode::Open);
    }
}
