//! Notes of a process for people.

use std::sync::Mutex;

use vmm_pool::sync::lock;

/// The most notes; further ones are left out.
const NOTES_MAX: usize = 32;

/// Sentences that a process shows in its statistics, each once. Its lock is a leaf.
#[derive(Debug, Default)]
pub struct Notes(Mutex<Vec<String>>);

impl Notes {
    /// Adds `text`, and logs it.
    pub fn add(&self, text: String) {
        let mut list = lock(&self.0);
        if !list.contains(&text) && list.len() < NOTES_MAX {
            tracing::warn!("{text}");
            list.push(text);
        }
    }

    pub(super) fn all(&self) -> Vec<String> {
        lock(&self.0).clone()
    }
}
