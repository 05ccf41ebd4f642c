//! Clients, pools and other things of the process that nodes need. They never enter a snapshot (D102).

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::Arc;

/// Values by type. For two of one type, wrap them in types of their own.
#[derive(Clone, Default)]
pub struct Bindings {
    values: HashMap<TypeId, Arc<dyn Any + Send + Sync>>,
}

impl Bindings {
    #[must_use]
    pub fn with<T: Send + Sync + 'static>(mut self, value: T) -> Self {
        self.values.insert(TypeId::of::<T>(), Arc::new(value));
        self
    }

    pub fn get<T: Send + Sync + 'static>(&self) -> Option<Arc<T>> {
        self.values
            .get(&TypeId::of::<T>())
            .cloned()
            .and_then(|value| value.downcast().ok())
    }
}

impl std::fmt::Debug for Bindings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bindings({})", self.values.len())
    }
}
