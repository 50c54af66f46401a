//! Proxies of the environment: case H5.

use inboxd_contract::Forwarder;
use inboxd_http::{HttpConfig, HttpForwarder, ProxyVariables};

use crate::support::{ACCEPTED, Message, OK, Raw, config};

fn through(proxy: &Raw, callback: impl Into<String>) -> HttpForwarder {
    let proxies = ProxyVariables {
        http: Some(format!("http://user:word@{}", proxy.addr)),
        all: Some(format!("http://{}", proxy.addr)),
        none: Some("exempt.invalid".to_owned()),
        ..ProxyVariables::default()
    };
    HttpForwarder::new(HttpConfig { proxies, ..config(callback) }).unwrap()
}

#[tokio::test]
async fn a_callback_on_this_machine_is_reached_directly() {
    let (proxy, app) = (Raw::answering(OK).await, Raw::answering(OK).await);
    for host in ["127.0.0.1", "localhost"] {
        let forwarder = through(&proxy, format!("http://{host}:{}/orders", app.addr.port()));
        assert_eq!(Message::new("m").send(&forwarder).await, ACCEPTED);
    }
    assert_eq!(app.requests().len(), 2);
    assert!(proxy.requests().is_empty());
}

#[tokio::test]
async fn any_other_goes_through_the_proxy_and_so_does_the_probe() {
    let proxy = Raw::answering(OK).await;
    let forwarder = through(&proxy, "http://app.invalid/orders");
    assert_eq!(forwarder.probe().await, Ok(()));
    assert_eq!(Message::new("m").send(&forwarder).await, ACCEPTED);
    let request = proxy.request();
    assert_eq!(request.lines()[0], "POST http://app.invalid/orders HTTP/1.1");
    assert_eq!(request.value("proxy-authorization"), Some("Basic dXNlcjp3b3Jk"));
    assert!(through(&proxy, "http://exempt.invalid/").probe().await.is_err());
}

#[tokio::test]
async fn the_environment_of_the_process_is_what_counts_by_default() {
    // In a child, since the environment belongs to the whole process.
    if std::env::var("INBOXD_TEST_PROXY_CHILD").is_ok() {
        let callback = std::env::var("INBOXD_TEST_CALLBACK").unwrap();
        let forwarder = HttpForwarder::new(HttpConfig::new(callback)).unwrap();
        assert_eq!(Message::new("m").send(&forwarder).await, ACCEPTED);
        return;
    }
    let (proxy, app) = (Raw::answering(OK).await, Raw::answering(OK).await);
    for callback in [app.url(), "http://app.invalid/orders".to_owned()] {
        let child = tokio::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "proxy::the_environment_of_the_process_is_what_counts_by_default"])
            .env("INBOXD_TEST_PROXY_CHILD", "1")
            .env("INBOXD_TEST_CALLBACK", &callback)
            .env("HTTP_PROXY", format!("http://{}", proxy.addr))
            .env("http_proxy", format!("http://{}", proxy.addr))
            .env_remove("NO_PROXY")
            .env_remove("no_proxy")
            .output()
            .await
            .unwrap();
        assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
    }
    assert_eq!((app.requests().len(), proxy.requests().len()), (1, 1));
}
