// ap_ctrl_hs by AXI4-Lite: what the registers say before, during and behind a run, byte strobes, interrupts.
`timescale 1ns / 1ps
module control_registers_tb;
    reg clk = 0, rst = 1, awvalid = 0, wvalid = 0, arvalid = 0, done = 0, started = 0;
    reg [11:0] awaddr = 0, araddr = 0;
    reg [31:0] wdata = 0, read_back;
    reg [3:0] wstrb = 0;
    wire awready, wready, bvalid, arready, rvalid, start, interrupt;
    wire [31:0] rdata;
    wire [2047:0] words;
    integer checks = 0, wrong = 0;
    control_registers registers(.clk(clk), .rst(rst), .awvalid(awvalid), .awready(awready), .awaddr(awaddr),
        .wvalid(wvalid), .wready(wready), .wdata(wdata), .wstrb(wstrb), .bvalid(bvalid), .bready(1'b1),
        .arvalid(arvalid), .arready(arready), .araddr(araddr), .rvalid(rvalid), .rready(1'b1), .rdata(rdata),
        .words(words), .start(start), .done(done), .interrupt(interrupt));
    always #5 clk = !clk;
    always @(posedge clk) if (start) started <= 1;

    task write(input [11:0] address, input [31:0] value, input [3:0] strobe);
        begin
            @(negedge clk);
            awaddr = address;
            wdata = value;
            wstrb = strobe;
            awvalid = 1;
            // Data may come behind its address.
            repeat (2) @(negedge clk);
            wvalid = 1;
            @(negedge clk);
            awvalid = 0;
            wvalid = 0;
            while (bvalid) @(negedge clk);
        end
    endtask

    task check(input [11:0] address, input [31:0] wanted);
        begin
            @(negedge clk);
            araddr = address;
            arvalid = 1;
            @(negedge clk);
            arvalid = 0;
            read_back = rdata;
            checks = checks + 1;
            if (!rvalid || read_back !== wanted) begin
                wrong = wrong + 1;
                $display("%h: %h, not %h", address, read_back, wanted);
            end
            @(negedge clk);
        end
    endtask

    task is(input value, input wanted);
        begin
            checks = checks + 1;
            if (value !== wanted) wrong = wrong + 1;
        end
    endtask

    initial begin
        repeat (4) @(negedge clk);
        rst = 0;
        check(12'h000, 32'h4);                 // idle
        write(12'h010, 32'h11223344, 4'hf);
        write(12'h010, 32'haabbccdd, 4'h5);
        check(12'h010, 32'h11bb33dd);
        write(12'h014, 32'h55667788, 4'hf);
        check(12'h014, 32'h55667788);
        is(words[8*12'h010 +: 8] == 8'hdd, 1);
        check(12'hff0, 0);                     // no register
        write(12'h000, 1, 4'hf);
        is(started, 1);
        check(12'h000, 32'h1);                 // running
        done = 1;
        @(negedge clk);
        done = 0;
        is(interrupt, 0);
        check(12'h000, 32'he);                 // done, idle, ready
        check(12'h000, 32'h4);                 // done is gone by reading
        write(12'h004, 1, 4'hf);
        write(12'h008, 1, 4'hf);
        write(12'h000, 1, 4'hf);
        started = 0;
        write(12'h000, 1, 4'hf);               // while it runs: nothing
        is(started, 0);
        done = 1;
        @(negedge clk);
        done = 0;
        @(negedge clk);
        is(interrupt, 1);
        check(12'h00c, 1);
        write(12'h00c, 1, 4'hf);               // toggled off
        is(interrupt, 0);
        check(12'h004, 1);
        check(12'h008, 1);
        $display("checks %0d wrong %0d", checks, wrong);
        $finish;
    end
endmodule
