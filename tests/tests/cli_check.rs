//! `iop-edge check`: what would start is said, and what would not, with all that is wrong.

use iop_tests::process::finish;
use iop_tests::run;

#[test]
fn without_a_file_the_demonstration_is_checked_and_that_is_said() {
    run(60, async {
        let dir = tempfile::tempdir().unwrap();
        let checked = finish("iop-edge", &["check"], &[], dir.path()).await;
        assert_eq!(checked.code, Some(0), "{}", checked.stderr);
        for part in ["no edge.toml here", "demonstration", "ok"] {
            assert!(checked.stdout.contains(part), "{part}: {}", checked.stdout);
        }
        std::fs::write(dir.path().join("edge.toml"), "[server]\n").unwrap();
        let checked = finish("iop-edge", &["check"], &[], dir.path()).await;
        assert_eq!((checked.code, &*checked.stdout), (Some(0), "edge.toml: ok\n"));
        // A file that was named is meant.
        let checked = finish("iop-edge", &["check", "--config", "gone.toml"], &[], dir.path()).await;
        assert_eq!((checked.code, &*checked.stdout), (Some(1), ""));
        assert!(
            checked.stderr.contains("gone.toml:1: (file): cannot be read"),
            "{}",
            checked.stderr
        );
        assert_eq!(
            std::fs::read_dir(dir.path()).unwrap().count(),
            1,
            "nothing is started"
        );
    });
}

#[test]
fn all_that_is_wrong_is_said_at_once_by_check_and_by_start() {
    run(60, async {
        let dir = tempfile::tempdir().unwrap();
        let text = "[gate]\nmax_attempts = 0\n[[models]]\nname = \"m\"\ncandidates = []\n[[models]]\nname = \"n\"\ncandidates = []\n";
        std::fs::write(dir.path().join("edge.toml"), text).unwrap();
        for args in [&["check"][..], &[]] {
            let refused = finish("iop-edge", args, &[], dir.path()).await;
            assert_eq!((refused.code, &*refused.stdout), (Some(1), ""));
            let lines: Vec<&str> = refused.stderr.lines().collect();
            let starts = [
                "edge.toml:2: gate.max_attempts: ",
                "edge.toml:5: models[0].candidates: ",
                "edge.toml:8: models[1].candidates: ",
            ];
            assert_eq!(lines.len(), starts.len(), "{}", refused.stderr);
            for (line, start) in lines.iter().zip(starts) {
                assert!(line.starts_with(start), "{start}: {}", refused.stderr);
            }
        }
    });
}
