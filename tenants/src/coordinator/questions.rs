//! What the coordinator asks, and which of its steps each question is.

use super::report::Step;
use crate::wire::{
    Ask, AskLent, AwaitConsent, Count, GiveUp, Hello, Hold, HostStep, LookIdle, Needs, SaveStep,
    SpillStep, Stats, StepOn, TakePhase,
};

/// A question of the coordinator's, which is one of its steps.
pub(super) trait Question: Ask {
    /// What people read of it.
    fn step(&self) -> Step;
}

impl Question for Hello {
    fn step(&self) -> Step {
        Step::Hello
    }
}

impl Question for Stats {
    fn step(&self) -> Step {
        Step::Stats
    }
}

impl Question for Count {
    fn step(&self) -> Step {
        Step::Count
    }
}

impl Question for AwaitConsent {
    fn step(&self) -> Step {
        Step::Consent(self.action)
    }
}

impl Question for GiveUp {
    fn step(&self) -> Step {
        Step::Consent(self.action)
    }
}

impl Question for Needs {
    fn step(&self) -> Step {
        Step::Needs
    }
}

impl Question for LookIdle {
    fn step(&self) -> Step {
        Step::Stats
    }
}

impl Question for Hold {
    fn step(&self) -> Step {
        Step::Cut
    }
}

impl Question for StepOn {
    fn step(&self) -> Step {
        Step::Drain
    }
}

impl Question for SaveStep {
    fn step(&self) -> Step {
        Step::Save
    }
}

impl Question for HostStep {
    fn step(&self) -> Step {
        Step::Host
    }
}

impl Question for SpillStep {
    fn step(&self) -> Step {
        Step::Spill
    }
}

impl Question for AskLent {
    fn step(&self) -> Step {
        Step::Lending
    }
}

impl Question for TakePhase {
    fn step(&self) -> Step {
        Step::Phase(self.order.phase())
    }
}
