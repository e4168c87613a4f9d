//! What people should know of a process.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Notes beyond these are left out.
const NOTES_MAX: usize = 32;

/// Sentences that a process shows in its statistics, each once. Its lock is a leaf.
#[derive(Debug, Default)]
pub struct Notes(Mutex<Vec<String>>);

impl Notes {
    fn list(&self) -> MutexGuard<'_, Vec<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds `text`, and logs it.
    pub fn add(&self, text: String) {
        let mut list = self.list();
        if !list.contains(&text) && list.len() < NOTES_MAX {
            tracing::warn!("{text}");
            list.push(text);
        }
    }

    pub(super) fn all(&self) -> Vec<String> {
        self.list().clone()
    }
}
