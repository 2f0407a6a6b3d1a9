// A page that is served while training fetches itself again and replaces what changed.
const interval = 2000;
async function refresh() {
  try {
    const response = await fetch(location.href, { cache: "no-store" });
    if (response.ok) {
      const page = new DOMParser().parseFromString(await response.text(), "text/html");
      const open = [...document.querySelectorAll("details")].map((details) => details.open);
      const fresh = page.querySelector("main"), old = document.querySelector("main");
      if (fresh && fresh.innerHTML !== old.innerHTML) {
        old.replaceWith(fresh);
        document.title = page.title;
        document.querySelectorAll("details").forEach((details, index) => { details.open = open[index] || false; });
      }
    }
  } catch (error) { /* the server has stopped; keep what is shown */ }
  setTimeout(refresh, interval);
}
setTimeout(refresh, interval);
