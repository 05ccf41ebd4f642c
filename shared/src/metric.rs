//! Metric families over closed labels: every series exists from the start, an increment is an array access.
//!
//! The only place in the workspace where label values become strings. A label can only be a `Label`, so no
//! text from outside can make a series (G81).

use std::marker::PhantomData;

use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};

use crate::label::Label;

/// A tuple of labels: one combination of words.
pub trait Labels: Copy {
    /// How many combinations there are.
    fn count() -> usize;
    /// The place of this combination, below `count()`.
    fn place(self) -> usize;
    /// Every combination's words, in place order.
    fn words() -> Vec<Vec<&'static str>>;
}

impl<A: Label> Labels for (A,) {
    fn count() -> usize {
        A::ALL.len()
    }
    fn place(self) -> usize {
        self.0.index()
    }
    fn words() -> Vec<Vec<&'static str>> {
        A::ALL.iter().map(|a| vec![a.word()]).collect()
    }
}

impl<A: Label, B: Label> Labels for (A, B) {
    fn count() -> usize {
        A::ALL.len() * B::ALL.len()
    }
    fn place(self) -> usize {
        self.0.index() * B::ALL.len() + self.1.index()
    }
    fn words() -> Vec<Vec<&'static str>> {
        product(<(A,)>::words(), B::ALL)
    }
}

impl<A: Label, B: Label, C: Label> Labels for (A, B, C) {
    fn count() -> usize {
        <(A, B)>::count() * C::ALL.len()
    }
    fn place(self) -> usize {
        (self.0, self.1).place() * C::ALL.len() + self.2.index()
    }
    fn words() -> Vec<Vec<&'static str>> {
        product(<(A, B)>::words(), C::ALL)
    }
}

impl<A: Label, B: Label, C: Label, D: Label> Labels for (A, B, C, D) {
    fn count() -> usize {
        <(A, B, C)>::count() * D::ALL.len()
    }
    fn place(self) -> usize {
        (self.0, self.1, self.2).place() * D::ALL.len() + self.3.index()
    }
    fn words() -> Vec<Vec<&'static str>> {
        product(<(A, B, C)>::words(), D::ALL)
    }
}

fn product<L: Label>(heads: Vec<Vec<&'static str>>, last: &[L]) -> Vec<Vec<&'static str>> {
    heads
        .into_iter()
        .flat_map(|head| {
            last.iter()
                .map(move |l| head.iter().copied().chain([l.word()]).collect())
        })
        .collect()
}

macro_rules! family {
    ($(#[$meta:meta])* $name:ident, $metric:ty, $vec:ty, |$opts:ident: $optsty:ty, $labels:ident| $make:expr) => {
        $(#[$meta])*
        pub struct $name<L> {
            series: Box<[$metric]>,
            of: PhantomData<fn(L)>,
        }

        impl<L: Labels> $name<L> {
            /// Registers the family and makes every series.
            ///
            /// # Errors
            /// When the registry has that name already or a name is malformed: a defect of the caller.
            pub fn register(registry: &Registry, $opts: $optsty, $labels: &[&str]) -> prometheus::Result<Self> {
                let vec: $vec = $make?;
                registry.register(Box::new(vec.clone()))?;
                let series = L::words().iter().map(|w| vec.get_metric_with_label_values(w)).collect::<Result<_, _>>()?;
                Ok(Self { series, of: PhantomData })
            }

            /// The series of one combination.
            pub fn at(&self, labels: L) -> &$metric {
                &self.series[labels.place()]
            }
        }
    };
}

family!(
    /// Counters by closed labels.
    Counters, IntCounter, IntCounterVec, |opts: Opts, labels| IntCounterVec::new(opts, labels)
);
family!(
    /// Gauges by closed labels.
    Gauges, IntGauge, IntGaugeVec, |opts: Opts, labels| IntGaugeVec::new(opts, labels)
);
family!(
    /// Histograms by closed labels.
    Histograms, Histogram, HistogramVec, |opts: HistogramOpts, labels| HistogramVec::new(opts, labels)
);

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus::core::Collector;

    crate::label_enum! { enum A { X => "x", Y => "y" } }
    crate::label_enum! { enum B { One => "1", Two => "2", Three => "3" } }

    #[test]
    fn every_combination_exists_and_has_its_own_place() {
        let registry = Registry::new();
        let family =
            Counters::<(A, B)>::register(&registry, Opts::new("demo_total", "Demo."), &["a", "b"]).unwrap();
        for (i, a) in A::ALL.iter().enumerate() {
            for (k, b) in B::ALL.iter().enumerate() {
                family.at((*a, *b)).inc_by((i * 10 + k + 1) as u64);
            }
        }
        let metrics = registry.gather();
        assert_eq!(metrics[0].get_metric().len(), 6);
        for m in metrics[0].get_metric() {
            let word = |n: &str| {
                m.get_label()
                    .iter()
                    .find(|l| l.name() == n)
                    .unwrap()
                    .value()
                    .to_owned()
            };
            let want = A::parse(&word("a")).unwrap().index() * 10 + B::parse(&word("b")).unwrap().index() + 1;
            assert_eq!(m.get_counter().get_value() as usize, want);
        }
        assert_eq!(family.at((A::X, B::One)).collect().len(), 1);
    }
}
